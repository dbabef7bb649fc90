import requests
import json
import time
# 定义一个发送请求的函数
def generate_request(prompt, max_tokens=100):
    headers = {"Content-Type": "application/json"}
    data = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0
    }
    response = requests.post("http://localhost:8000/generate", headers=headers, data=json.dumps(data))
    return response.json()
# 并发发送不同长度的请求
start_time = time.time()
# 请求 A: 短请求
req_a = generate_request("介绍一下什么是大语言模型", max_tokens=30)
# 请求 B: 长请求
req_b = generate_request("详细描述Continuous Batching的工作机制和优势", max_tokens=150)
# 请求 C: 中等请求
req_c = generate_request("什么是HoL Blocking", max_tokens=50)
end_time = time.time()
print(f"总处理时间（并发模拟）: {end_time - start_time:.2f} 秒")
